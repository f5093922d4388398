"""How events change the state (`apply`); the same functions run live, at replay and in audits."""
