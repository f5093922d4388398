"""How a job's look is told: conditions, status, Events, money."""
