# TRL has an environment of its own, kept outside the checkout between runs; nothing of PolyRL needs it.

##@ Compare with TRL
test-trl: install ## Pass the tests that compare losses and gradients with TRL's, on one batch
	trl=$$(benchmarks/learner/install_trl.sh $(BIN)/uv $(BIN)/python); \
	POLYRL_TRL_PYTHON=$$trl $(BIN)/python -m pytest tests/integration/trainer/test_equals_trl.py -m trl -q

bench-learner: install ## Measure the learner beside TRL's, beside a plain loop, and beside busy rewards; one line of JSON
	$(BIN)/python benchmarks/learner/run.py $(ARGS)

.PHONY: test-trl bench-learner
