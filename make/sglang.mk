# The conformance suite on the real SGLang. SGLang pins its own torch, so it gets an environment of its own, kept outside the
# checkout between runs.
SGLANG_ENV = HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1
ON_SGLANG = sglang=$$(tests/sglang/install.sh $(BIN)/uv $(BIN)/python); \
  tests/sglang/confine.sh env $(SGLANG_ENV) POLYRL_SGLANG_PYTHON=$$sglang

##@ Test on the real SGLang
test-sglang: install ## Pass the tests that need the real SGLang, on the CPU, confined to loopback
	$(ON_SGLANG) $(BIN)/python -m pytest tests/integration -m sglang -q

bench-pause-sglang: install ## Measure what an update of weights costs the real SGLang, on the CPU (ARGS="--switch keep")
	$(ON_SGLANG) $(BIN)/python benchmarks/weights/pause.py --engine sglang $(ARGS)

bench-hand-over-sglang: install ## Compare a file in memory with a handle to shared memory, by which weights come into the real SGLang
	$(ON_SGLANG) $(BIN)/python benchmarks/weights/hand_over.py $(ARGS)

.PHONY: test-sglang bench-pause-sglang bench-hand-over-sglang
