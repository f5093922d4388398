"""The wire's bytes: one frame of every message, byte for byte, and decoders that survive anything.

A golden line that must change means a peer of yesterday no longer understands us: append a field with a default, or
take a new tag, instead.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import msgspec
import msgspec.inspect
import numpy as np
import pytest
from hypothesis import given, strategies as st

from polyrl import wire
from polyrl.errors import ProtocolError
from polyrl.sample import DiscardReason, Finish, Group, Pool, Purpose, Response, SamplingParams, Scored, Span
from polyrl.weights.engine_sums import EngineSum

_ROWS = np.array([(7, 3, 2, 0), (8, 0, 1, 2)], dtype=wire.ROW_DTYPE).tobytes()
_IDS, _LOGPROBS = wire.pack_ids([5, 6, 7]), np.array([-0.5, -1.0, -2.0], dtype="<f4").tobytes()
_SAMPLING = SamplingParams(64, 0.5, top_p=0.9, top_k=20, stop_token_ids=(2, 3), seed=11)
_RESPONSE = Response(
    "4.1",
    _IDS,
    logprobs=_LOGPROBS,
    loss_mask=b"\1\1\0",
    spans=(Span(0, 2, version=9, engine="e", attempt=1),),
    turn=0,
    finish=Finish.STOP,
)
_GROUP = Group(
    4, 2, purpose=Purpose.TRAIN, prompt_ids=_IDS, n=8, sampling=_SAMPLING, min_version=9, max_version=9, priority=1
)

AGENT, TO_AGENT = wire.decode_from_agent, wire.decode_to_agent
TRAINER, TO_TRAINER = wire.decode_from_trainer, wire.decode_to_trainer
PULLER, PEER = wire.decode_from_puller, wire.decode_from_peer

GOLDEN: list[tuple[Callable[[bytes], Any], Any, str]] = [
    (
        AGENT,
        wire.Hello(
            1,
            "e",
            pool=Pool.SPOT,
            max_running=16,
            kv_tokens=4096,
            max_context=512,
            weight_version=9,
            held=(wire.HeldAssignment(7, "4.1", attempt=2, length=30),),
            versions=(8, 9),
            leaving_s=20.0,
            leaving_reason="SIGTERM",
            seq=5,
            receipts={8: b"eight", 9: b"nine"},
            peer_key=b"key",
            peer_port=5004,
            sleeps=True,
            asleep=True,
            sum=EngineSum("SGLang", b"sum", exact=True),
        ),
        (
            "01dc0013a568656c6c6f01a165a473706f7410cd1000cd020009919407a3342e31021e920809cb4034000000000000a75349"
            "475445524d058208c405656967687409c4046e696e65c4036b6579cd138cc3c393a653474c616e67c40373756dc3"
        ),
    ),
    (
        AGENT,
        wire.Deltas(5, 9, rows=_ROWS, ids=_IDS, logprobs=_LOGPROBS),
        (
            "0196a3746f6b0509c41607000000030000000200000800000000000000010002c40c050000000600000007000000c40c"
            "000000bf000080bf000000c0"
        ),
    ),
    (
        AGENT,
        wire.PrefixUnknown(7),
        "0192a86e6f70726566697807",
    ),
    (
        AGENT,
        wire.Heartbeat(3, 1, kv_free_tokens=1000, newest=7),
        "0195a4626561740301cd03e807",
    ),
    (
        AGENT,
        wire.WeightsLoaded(
            9,
            0.5,
            load_seconds=0.25,
            bytes_pulled=1 << 20,
            receipt=b"nine",
            bytes_from_peers=3 << 18,
            liars=("b",),
            wait_seconds=0.125,
            verify_seconds=0.0625,
            sum=EngineSum("SGLang", b"sum", exact=True),
            step_seconds=0.03125,
            read_seconds=0.0009765625,
            tried_seconds_ago=0.25,
        ),
        (
            "019ea773657276696e6709cb3fe0000000000000cb3fd0000000000000ce00100000c4046e696e65ce000c000091a162"
            "cb3fc0000000000000cb3fb000000000000093a653474c616e67c40373756dc3cb3fa0000000000000cb3f50000000000000"
            "cb3fd0000000000000"
        ),
    ),
    (
        AGENT,
        wire.WeightsFailed(9, 8, reason="checksum"),
        "0194a5776661696c0908a8636865636b73756d",
    ),
    (
        AGENT,
        wire.Asleep(0.5),
        "0193a661736c656570cb3fe000000000000000",
    ),
    (
        AGENT,
        wire.HandBack(7, "draining", detail="soon"),
        "0194a872657475726e656407a8647261696e696e67a4736f6f6e",
    ),
    (
        AGENT,
        wire.Leaving(20.0, "SIGTERM"),
        "0193a76c656176696e67cb4034000000000000a75349475445524d",
    ),
    (
        AGENT,
        wire.Deregister("done"),
        "0192a3627965a4646f6e65",
    ),
    (
        TO_AGENT,
        wire.Welcome(1, 3.0, beat_s=1.0, delta_s=0.03),
        "0195a777656c636f6d6501cb4008000000000000cb3ff0000000000000cb3f9eb851eb851eb8",
    ),
    (
        TO_AGENT,
        wire.Assign(
            7,
            "4.1",
            attempt=2,
            input_ids=_IDS,
            offset=0,
            max_new_tokens=64,
            sampling=_SAMPLING,
            min_version=9,
            max_version=9,
            base=16,
            base_check=12,
            turn_start=0,
        ),
        (
            "019da661737369676e07a3342e3102c40c05000000060000000700000000409740cb3fe0000000000000cb3feccccccc"
            "cccccd149202030b900909100c00"
        ),
    ),
    (
        TO_AGENT,
        wire.Cancel(7),
        "0192a663616e63656c07",
    ),
    (
        TO_AGENT,
        wire.Recall(7),
        "0192a672657475726e07",
    ),
    (
        TO_AGENT,
        wire.TokensKept(5),
        "0192a46b65707405",
    ),
    (
        TO_AGENT,
        wire.Resend(7, 30),
        "0193a6726573656e64071e",
    ),
    (
        TO_AGENT,
        wire.Announce(9, "tcp://h:1", public_key="k", manifest_hash=b"hash", others=("h",)),
        "0196a8616e6e6f756e636509a97463703a2f2f683a31a16bc4046861736891a168",
    ),
    (
        TO_AGENT,
        wire.GoToSleep(90.0),
        "0193a5736c656570cb405680000000000000",
    ),
    (
        TO_AGENT,
        wire.WakeUp(),
        "0191a477616b65",
    ),
    (
        TO_AGENT,
        wire.StartDrain(20.0, "notice"),
        "0193a5647261696ecb4034000000000000a66e6f74696365",
    ),
    (
        TO_AGENT,
        wire.Fenced("epoch", lease_over=True),
        "0193a666656e636564a565706f6368c3",
    ),
    (
        TRAINER,
        wire.TrainerHello(1, 5, trainer="t1", next_group=9, next_batch=6, fresh=True, acknowledged_above=((7, 9),)),
        "0199a67468656c6c6f0105a274310906c391920709c2",
    ),
    (
        TRAINER,
        wire.Submit(1, (_GROUP,)),
        (
            "0193a67375626d69740191990402a5747261696ec40c050000000600000007000000089740cb3fe0000000000000cb3f"
            "eccccccccccccd149202030b90090901"
        ),
    ),
    (
        TRAINER,
        wire.Score(2, "4.1", turn=0, reward=1.0, metrics={"exact": 1.0}),
        "0196a573636f726502a3342e3100cb3ff000000000000081a56578616374cb3ff0000000000000",
    ),
    (
        TRAINER,
        wire.Extend(3, "4.1", turn=0, ids=_IDS),
        "0195a6657874656e6403a3342e3100c40c050000000600000007000000",
    ),
    (
        TRAINER,
        wire.Reject(4, "4.1", reason=DiscardReason.REWARD_RAISED, detail="ValueError"),
        "0195a672656a65637404a3342e31ac726577617264526169736564aa56616c75654572726f72",
    ),
    (
        TRAINER,
        wire.BatchRequest(
            5, 2, purpose=Purpose.TRAIN, min_samples=16, max_samples=32, max_tokens=4096, deadline_s=60.0, alone=True
        ),
        "0199a46e6578740502a5747261696e1020cd1000cb404e000000000000c3",
    ),
    (
        TRAINER,
        wire.Withdraw(6, 5),
        "0193a877697468647261770605",
    ),
    (
        TRAINER,
        wire.NoticesTaken((4, 9)),
        "0192a76e6f7469636564920409",
    ),
    (
        TRAINER,
        wire.Covered(6, ((0, 3), (5, 6))),
        "0193a7636f76657265640692920003920506",
    ),
    (
        TRAINER,
        wire.Acknowledge(6, 5),
        "0193a361636b0605",
    ),
    (
        TRAINER,
        wire.EndStep(7, 2, purpose=Purpose.EVAL),
        "0194a7656e64737465700702a46576616c",
    ),
    (
        TRAINER,
        wire.PublishVersion(8, 9, endpoint="tcp://h:1", public_key="k", manifest_hash=b"hash", receipt=b"nine"),
        "019ba77075626c6973680809a97463703a2f2f683a31a16bc40468617368c40000c4046e696e650090",
    ),
    (
        TRAINER,
        wire.TrainerReport(10, "rl", step=2, values={"reward": 0.5}),
        "0197a67265706f72740aa2726c0281a6726577617264cb3fe00000000000009090",
    ),
    (
        TRAINER,
        wire.FinishRun(11, True, message="done"),
        "0194a666696e6973680bc3a4646f6e65",
    ),
    (
        TRAINER,
        wire.FetchReport("j-trainer-0-x", "hf://o/n", fetched=3, total=9),
        "0195a86665746368696e67ad6a2d747261696e65722d302d78a868663a2f2f6f2f6e0309",
    ),
    (
        TRAINER,
        wire.TrainerHeartbeat(),
        "0191a57462656174",
    ),
    (
        TO_TRAINER,
        wire.TrainerWelcome(
            1,
            3.0,
            beat_s=1.0,
            journal="j1",
            next_group=9,
            version=4,
            manifest_hash=b"hash",
            held=(
                wire.HeldGroup(
                    7, 2, purpose=Purpose.TRAIN, digest=b"digest", min_version=3, max_version=4, scored=1, turn=0
                ),
            ),
            content=b"these",
        ),
        (
            "019aa87477656c636f6d6501cb4008000000000000cb3ff0000000000000a26a310904c40468617368919a0702a574726169"
            "6ec40664696765737403040100c2c400c4057468657365"
        ),
    ),
    (
        TO_TRAINER,
        wire.VersionServed(9),
        "0192ad76657273696f6e53657276656409",
    ),
    (
        TO_TRAINER,
        wire.Accepted(1),
        "0192a8616363657074656401",
    ),
    (
        TO_TRAINER,
        wire.Declined(1, "no"),
        "0193a77265667573656401a26e6f",
    ),
    (
        TO_TRAINER,
        wire.TurnDone(4, 1, purpose=Purpose.TRAIN, step=2, response=_RESPONSE, start=16, check=12),
        (
            "0198a47475726e0401a5747261696e0297a3342e31c40c050000000600000007000000c40c000000bf000080bf000000"
            "c0c4030101009195000209a1650100a473746f70100c"
        ),
    ),
    (
        TO_TRAINER,
        wire.Batch(
            5,
            3,
            step=2,
            samples=(Scored(4, 1, response=_RESPONSE, reward=1.0, metrics={"exact": 1.0}),),
            last=True,
            checks=(12,),
        ),
        (
            "0197a562617463680503029195040197a3342e31c40c050000000600000007000000c40c000000bf000080bf000000c0"
            "c4030101009195000209a1650100a473746f70cb3ff000000000000081a56578616374cb3ff0000000000000c3910c"
        ),
    ),
    (
        TO_TRAINER,
        wire.TurnsAwaited((("4.1", 2),)),
        "0192a7617761697465649192a3342e3102",
    ),
    (
        TO_TRAINER,
        wire.FetchedText(_RESPONSE),
        (
            "0192a47465787497a3342e31c40c050000000600000007000000c40c000000bf000080bf000000c0c403010100919500"
            "0209a1650100a473746f70"
        ),
    ),
    (
        TO_TRAINER,
        wire.Fetched(5, 1),
        "0193a7666574636865640501",
    ),
    (
        TRAINER,
        wire.Fetch(5, ("4.1", "4.2")),
        "0193a566657463680592a3342e31a3342e32",
    ),
    (
        TO_TRAINER,
        wire.Late(5, "engine e"),
        "0193a46c61746505a8656e67696e652065",
    ),
    (
        TO_TRAINER,
        wire.GroupDropped(4, 2, purpose=Purpose.TRAIN, reason=DiscardReason.FILTERED, detail="no spread"),
        "0196a764726f707065640402a5747261696ea866696c7465726564a96e6f20737072656164",
    ),
    (
        TO_TRAINER,
        wire.Fenced("epoch"),
        "0193a666656e636564a565706f6368c2",
    ),
    (
        TO_TRAINER,
        wire.TrainerHeartbeat(),
        "0191a57462656174",
    ),
    (
        TO_AGENT,
        wire.Peers((wire.Peer("b", b"key", "tcp://h:1"), wire.Peer("c", b"key2")), gone=("d",), whole=True),
        "0194a570656572739293a162c4036b6579a97463703a2f2f683a3193a163c4046b657932a091a164c3",
    ),
    (
        PULLER,
        wire.GetManifest(9),
        "0192a46765746d09",
    ),
    (
        PULLER,
        wire.GetChunk(9, b"hash"),
        "0193a46765746309c40468617368",
    ),
    (
        PULLER,
        wire.GetLent(9, b"hash", returned=(1, 2**63)),
        "0194a46765746c09c404686173689201cf8000000000000000",
    ),
    (
        PEER,
        wire.GetManifest(9),
        "0192a46765746d09",
    ),
    (
        PEER,
        wire.GetChunk(9, b"hash"),
        "0193a46765746309c40468617368",
    ),
    (
        PEER,
        wire.GetHeld(b"hash"),
        "0192a467657468c40468617368",
    ),
    (
        PEER,
        wire.ServeOffer(),
        "0191a56f66666572",
    ),
]

CONVERSATIONS = {
    AGENT: wire.FromAgent,
    TO_AGENT: wire.ToAgent,
    TRAINER: wire.FromTrainerPod,
    TO_TRAINER: wire.ToTrainer,
    PULLER: wire.FromPuller,
    PEER: wire.FromPeer,
}
DECODERS = list(CONVERSATIONS)


@pytest.mark.parametrize(("decode", "message", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_the_bytes_of_every_message_are_what_they_were(
    decode: Callable[[bytes], Any], message: Any, golden: str
) -> None:
    assert wire.encode(message).hex() == golden
    assert decode(bytes.fromhex(golden)) == message


@pytest.mark.parametrize(
    "golden",
    [
        "0195a67265706f72740aa2726c0281a6726577617264cb3fe0000000000000",
        "0196a67265706f72740aa2726c0281a6726577617264cb3fe000000000000090",
    ],
    ids=["before samples", "before engines"],
)
def test_a_report_of_an_older_trainer_is_understood(golden: str) -> None:
    frame = bytes.fromhex(golden)
    assert wire.decode_from_trainer(frame) == wire.TrainerReport(10, "rl", step=2, values={"reward": 0.5})


def test_a_report_of_load_that_names_no_assignment_is_understood() -> None:
    assert AGENT(bytes.fromhex("0194a4626561740301cd03e8")) == wire.Heartbeat(3, 1, kv_free_tokens=1000)


@pytest.mark.parametrize(
    ("decode", "golden"),
    [
        (
            AGENT,
            "019da568656c6c6f01a165a473706f7410cd1000cd020009919407a3342e31021e920809cb4034000000000000a75349475445524d05",
        ),
        (AGENT, "0195a773657276696e6709cb3fe0000000000000cb3fd0000000000000ce00100000"),
        (TRAINER, "0198a77075626c6973680809a97463703a2f2f683a31a16bc40468617368c40000"),
    ],
    ids=["Hello", "WeightsLoaded", "PublishVersion"],
)
def test_peers_from_before_receipts_are_understood(decode: Callable[[bytes], Any], golden: str) -> None:
    message = decode(bytes.fromhex(golden))
    assert not getattr(message, "receipts", getattr(message, "receipt", None))


@pytest.mark.parametrize(
    "golden",
    [
        "019ea568656c6c6f01a165a473706f7410cd1000cd020009919407a3342e31021e920809cb4034000000000000a75349475445524d05"
        "8208c405656967687409c4046e696e65",
        "0196a773657276696e6709cb3fe0000000000000cb3fd0000000000000ce00100000c4046e696e65",
    ],
    ids=["Hello", "WeightsLoaded"],
)
def test_an_agent_from_before_the_exchange_takes_no_part(golden: str) -> None:
    message = AGENT(bytes.fromhex(golden))
    assert not getattr(message, "peer_key", b"")
    assert not getattr(message, "bytes_from_peers", 0)


@pytest.mark.parametrize(
    "golden",
    [
        "01dc0012a568656c6c6f01a165a473706f7410cd1000cd020009919407a3342e31021e920809cb4034000000000000a75349"
        "475445524d058208c405656967687409c4046e696e65c4036b6579cd138cc3c3",
        "019aa773657276696e6709cb3fe0000000000000cb3fd0000000000000ce00100000c4046e696e65ce000c000091a162"
        "cb3fc0000000000000cb3fb0000000000000",
    ],
    ids=["Hello", "WeightsLoaded"],
)
def test_an_agent_from_before_sums_gives_none(golden: str) -> None:
    assert AGENT(bytes.fromhex(golden)).sum is None


def test_an_agent_from_before_trials_has_not_tried_its_engine() -> None:
    frame = (
        "019ba773657276696e6709cb3fe0000000000000cb3fd0000000000000ce00100000c4046e696e65ce000c000091a162"
        "cb3fc0000000000000cb3fb000000000000093a653474c616e67c40373756dc3"
    )
    assert AGENT(bytes.fromhex(frame)).step_seconds == AGENT(bytes.fromhex(frame)).read_seconds == 0


def test_an_agent_from_before_it_said_when_it_tried_its_engine_did_so_long_ago() -> None:
    frame = (
        "019da773657276696e6709cb3fe0000000000000cb3fd0000000000000ce00100000c4046e696e65ce000c000091a162"
        "cb3fc0000000000000cb3fb000000000000093a653474c616e67c40373756dc3cb3fa0000000000000cb3f50000000000000"
    )
    assert AGENT(bytes.fromhex(frame)).tried_seconds_ago == float("inf")


def test_an_assignment_from_before_stop_strings_is_understood() -> None:
    frame = (
        "019ca661737369676e07a3342e3102c40c05000000060000000700000000409640cb3fe0000000000000cb3feccccccc"
        "cccccd149202030b0909100c"
    )
    assert TO_AGENT(bytes.fromhex(frame)).sampling == _SAMPLING


@pytest.mark.parametrize("decode", DECODERS)
def test_no_message_is_without_its_golden_frame(decode: Callable[[bytes], Any]) -> None:
    shown = {type(message) for other, message, _ in GOLDEN if other is decode}
    assert shown == set(typing.get_args(CONVERSATIONS[decode]))


def _valid(message: Any) -> bool:
    try:
        wire.check_deltas(message)
    except ProtocolError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({type(m) for _, m, _ in GOLDEN}, key=lambda kind: kind.__name__))
@given(data=st.data())
def test_any_message_comes_back_as_it_was_sent(kind: type[Any], data: st.DataObject) -> None:
    message = msgspec.convert(data.draw(_fields_of(kind)), kind)
    for decode, conversation in CONVERSATIONS.items():
        if kind in typing.get_args(conversation) and (kind is not wire.Deltas or _valid(message)):
            assert decode(wire.encode(message)) == message


def _fields_of(kind: type[Any]) -> st.SearchStrategy[list[Any]]:
    """Lists as msgspec reads them, random in every field of the kind's golden instance."""
    example = next(message for _, message, _ in GOLDEN if type(message) is kind)
    tag = kind.__struct_config__.tag
    fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    values = [_like(getattr(example, field.name), field.type) for field in fields]
    return st.tuples(*values).map(lambda fields: [tag, *fields])


def _like(value: Any, kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, (Pool, Purpose, DiscardReason, Finish)):
        return st.sampled_from([member.value for member in type(value)])
    if isinstance(value, int):
        low, high = getattr(kind, "ge", None), getattr(kind, "le", None)
        return st.integers(-(2**63) if low is None else low, 2**64 - 1 if high is None else high)
    if isinstance(value, float):
        return st.floats(allow_nan=False)
    if isinstance(value, str):
        return st.text(max_size=20)
    if isinstance(value, bytes):
        return st.binary(max_size=40)
    return st.just(msgspec.to_builtins(value, builtin_types=(bytes,)))


def _only_protocol_errors(frame: bytes) -> None:
    for decode in DECODERS:
        try:
            decode(frame)
        except ProtocolError:
            continue


@given(st.binary(max_size=200))
def test_random_bytes_raise_protocol_error_and_nothing_else(frame: bytes) -> None:
    _only_protocol_errors(frame)
    _only_protocol_errors(bytes([wire.WIRE_VERSION]) + frame)


@given(
    golden=st.sampled_from([golden for *_, golden in GOLDEN]),
    cut=st.integers(0, 200),
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=4),
    tail=st.binary(max_size=8),
)
def test_mutated_frames_raise_protocol_error_and_nothing_else(
    golden: str, cut: int, flips: list[tuple[int, int]], tail: bytes
) -> None:
    frame = bytearray(bytes.fromhex(golden))
    for place, mask in flips:
        frame[place % len(frame)] ^= mask
    _only_protocol_errors(bytes(frame[: len(frame) - cut % len(frame)] + tail))


@pytest.mark.parametrize("depth", [100, 10_000, 1_000_000])
@pytest.mark.parametrize("decode", DECODERS)
def test_deep_nesting_is_refused(decode: Callable[[bytes], Any], depth: int) -> None:
    with pytest.raises(ProtocolError):
        decode(bytes([wire.WIRE_VERSION]) + b"\x91" * depth)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01",
        b"\x02\x91\xa6tbeat",
        b"\x01\x91\xa5tbeat\x00",
        b"\x01\xdd\xff\xff\xff\xff",
        b"\x01\x93\xa4hell",
        bytes(wire.MAX_FRAME_BYTES + 1),
    ],
    ids=["empty", "no body", "other version", "trailing byte", "4 billion items", "unknown tag", "too large"],
)
@pytest.mark.parametrize("decode", DECODERS)
def test_what_is_no_frame_is_refused(decode: Callable[[bytes], Any], frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


def test_a_newer_peer_with_an_appended_field_is_understood() -> None:
    longer = b"\x01" + msgspec.msgpack.encode(["bye", "done", "a field of tomorrow"])
    assert wire.decode_from_agent(longer) == wire.Deregister("done")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        pytest.param({"rows": _ROWS[:-1]}, "impossible lengths", id="half a row"),
        pytest.param({"ids": _IDS[:-1]}, "impossible lengths", id="half an id"),
        pytest.param({"logprobs": _LOGPROBS + b"1234"}, "impossible lengths", id="too many logprobs"),
        pytest.param({"ids": _IDS[4:], "logprobs": _LOGPROBS[4:]}, "count other tokens", id="a token fewer"),
        pytest.param(
            {"rows": bytes(wire.ROW_DTYPE.itemsize * (wire.MAX_ROWS + 1))},
            "more than 16384 delta rows",
            id="too many rows",
        ),
        pytest.param({"rows": _ROWS[:-1] + b"\x03"}, "unknown finish code", id="a finish code too high"),
    ],
)
def test_deltas_whose_columns_disagree_are_refused(changes: dict[str, bytes], fault: str) -> None:
    deltas = msgspec.structs.replace(wire.Deltas(5, 9, rows=_ROWS, ids=_IDS, logprobs=_LOGPROBS), **changes)
    with pytest.raises(ProtocolError, match=fault):
        wire.decode_from_agent(wire.encode(deltas))
