# Figures, small: each benchmark in benchmarks/ can do more when it is run by itself.
##@ Measure
bench: install ## Measure: ledger, manager and kills, a few minutes in all, as one table
	$(BIN)/python benchmarks/bench.py

house: install ## Print the figures of the tree itself: how much there is, how it lies (ARGS=another checkout to set beside it)
	$(BIN)/python benchmarks/house.py $(ARGS) .

.PHONY: bench house
