"""One job at a time: observe, decide (core), execute; the queue before it, the status and Events after it."""
