"""What the operator knows of the cluster without asking: watches, the cache they feed, what it expects to see next."""
