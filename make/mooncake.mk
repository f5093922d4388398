# The weight plane's conformance suite over the real Mooncake transfer engine. The wheel is installed into .venv, where nothing
# else uses it, and libibverbs1 by apt where it is missing. The engine listens on all addresses: it is confined to loopback.
define MOONCAKE
	ldconfig -p | grep -q libibverbs.so.1 || { apt-get update -q && apt-get install -qy --no-install-recommends libibverbs1; }
	$(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[mooncake]'
endef

##@ Test on the real Mooncake transfer engine
test-mooncake: install ## Pass the weight plane's tests over the Mooncake transfer engine, by TCP, confined to loopback
	$(MOONCAKE)
	tests/sglang/confine.sh env POLYRL_WEIGHTS_BY=mooncake $(BIN)/python -m pytest tests/integration/weights -q $(ARGS)

.PHONY: test-mooncake
