"""The public client of a manager: submit groups, stream scored batches, acknowledge, publish."""
