# Figures, small: each benchmark in benchmarks/ can do more when it is run by itself.
##@ Measure
bench: install ## Measure: ledger, manager and kills, a few minutes in all, as one table
	$(BIN)/python benchmarks/bench.py

.PHONY: bench
