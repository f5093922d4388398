"""Rules over a whole manifest, one file per part of it: each yields sentences that name the field."""
