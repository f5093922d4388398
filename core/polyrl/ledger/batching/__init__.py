"""From scored samples to batches: complete groups, filters, and what is discarded with which reason."""
