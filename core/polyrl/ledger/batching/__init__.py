"""From scored samples to batches: `discards` ends groups untrained, `packing` answers requests with the others."""
