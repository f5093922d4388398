"""Events change the state here and nowhere else; the same code runs live, at replay and in audits."""
