"""The history of a run as records, and the checks that go through it with books of their own."""
