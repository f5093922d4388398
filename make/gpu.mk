##@ GPUs
gpu-check: install ## Check the learner's ways on GPUs against those on CPUs; where there is no GPU it says so
	$(BIN)/python benchmarks/gpu/check.py $(ARGS)

bench-gpu: install ## Measure the learner on GPUs: tokens per second, MFU and memory of 0.5B to 7B shapes, a line of JSON each
	$(BIN)/python benchmarks/gpu/speed.py $(ARGS)

.PHONY: gpu-check bench-gpu
