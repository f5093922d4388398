# The operator, the CRD and the chart against a bare API server: etcd and kube-apiserver as processes, and no node. They come
# from the folder that KUBEBUILDER_ASSETS names, or from a kind cluster that runs here.
API_TESTS := tests/integration/cluster tests/integration/admission tests/integration/chart
FETCH_API_SERVER := $(POLYRL_CLUSTER_PREFIX) tests/integration/cluster/fetch_api_server.sh

##@ Test on a bare API server
test-api: WORKERS = 3  # each file has an etcd and an API server of its own, which compute beside it
test-api: install ## Pass the tests that need an API server and Helm (ARGS="-m slow" for those that take long)
	assets=$${KUBEBUILDER_ASSETS:-$$($(FETCH_API_SERVER))}; \
	$(POLYRL_CLUSTER_PREFIX) env KUBEBUILDER_ASSETS="$$assets" OMP_NUM_THREADS=1 \
	  $(abspath $(BIN))/python -m pytest $(API_TESTS) -m "api and not slow" -q $(PARALLEL) $(ARGS)

.PHONY: test-api
