"""How a simulated engine follows orders to sleep and to wake, which the production `RestOrders` keeps for it."""

from __future__ import annotations

from typing import Protocol

from polyrl.wire import Asleep, FromAgent, GoToSleep, WakeUp
from polyrl_rollout.agent.rest import RestOrders
from polyrl_rollout.testing.simulation.schedule import EnginePlan
from polyrl_rollout.testing.simulation.world import World


class RestingEngine(Protocol):
    """An engine whose memory the learner needs at times; moments are virtual seconds."""

    name: str
    plan: EnginePlan
    alive: bool
    version: int
    frozen_until: float
    sleepless_until: float

    @property
    def is_welcome(self) -> bool: ...

    def send(self, message: FromAgent) -> None: ...

    def rest(self) -> None: ...

    def rise(self, version: int) -> None: ...

    def confirm_awake(self) -> None: ...


class Rests:
    """How one engine rests, as long as it lives."""

    def __init__(self, world: World, engine: RestingEngine) -> None:
        self.orders = RestOrders(engine.plan.sleep_s > 0)
        self._world, self._engine = world, engine
        self._falls: GoToSleep | None = None
        self._busy = False
        """Whether it falls asleep, by the order above, or wakes."""
        self._staged = -1
        if self.orders.able:
            world.rests(engine.name, asleep=True)

    def order(self, order: GoToSleep | WakeUp) -> None:
        """What the manager wants; what is under way ends first."""
        self.orders.order(order)
        self._follow()

    def keeps(self, version: int) -> bool:
        """Whether a version that has come is loaded when the engine wakes."""
        if not self.orders.able or not (self.orders.asleep or self._busy):
            return False
        self._staged = max(self._staged, version)
        return True

    def _follow(self) -> None:
        if self._busy or not self._engine.alive:
            return
        match self.orders.take():
            case GoToSleep() as order if self.orders.asleep:
                self._engine.send(Asleep(0.0, order.order))
            case GoToSleep() as order:
                self._begin(order)
                self._staged = max(self._staged, self._engine.version)
                self._engine.rest()
            case WakeUp() if self.orders.asleep:
                self._world.after(self._engine.plan.sleep_s, self._wake)
            case WakeUp():
                self._engine.confirm_awake()

    def _begin(self, falls: GoToSleep | None) -> None:
        self._busy, self._falls = True, falls
        self._world.after(self._engine.plan.sleep_s, self._end)

    def _wake(self) -> None:
        """Versions on their way are here; meanwhile another order may have come, or the lease may have ended."""
        engine, now = self._engine, self._world.now
        if engine.alive and now < engine.frozen_until:
            self._world.at(engine.frozen_until, self._wake)
        elif engine.alive and not self._busy and self.orders.asleep and self.orders.is_wanted and engine.is_welcome:
            self.orders.asleep = False
            self._world.rests(engine.name, asleep=False)
            self._begin(None)

    def _end(self) -> None:
        engine, now = self._engine, self._world.now
        hangs_until = max(engine.frozen_until, engine.sleepless_until if self._falls else 0.0)
        if engine.alive and now < hangs_until:
            self._world.at(hangs_until, self._end)
            return
        if not engine.alive:
            return
        self._busy = False
        if self._falls:
            self.orders.asleep = True
            self._world.rests(engine.name, asleep=True)
            engine.send(Asleep(engine.plan.sleep_s, self._falls.order))
        else:
            engine.rise(self._staged)
        self._follow()
