# A cluster to test on: kind's, or any other (docs/how-to/test-cluster.md). POLYRL_CLUSTER_PREFIX is a command that every
# program for it is run under, where docker, kind, kubectl and helm are not simply in PATH.
CLUSTER := $(POLYRL_CLUSTER_PREFIX) env PYTHONPATH=tests/e2e $(abspath $(BIN))/python -m cluster
ON_CLUSTER := $(POLYRL_CLUSTER_PREFIX) env $(if $(KUBECONFIG),,KUBECONFIG=$(abspath .cluster/kubeconfig))
REGISTRY ?= polyrl.test
VARIANT ?= cpu
BASE ?= python:3.11-slim
PIP_ARGS ?=
# The tag follows what lies in the images, so that a change of the code is a new image, and pods of the old one are replaced.
# What is there under it is not built again; under a TAG that is given, it is.
GIVEN_TAG := $(TAG)
TAG := $(or $(TAG),$(shell (echo $(VARIANT) $(BASE); find constraints.lock pyproject.toml README.md LICENSE images core cli operator \
  rollout trainer -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 cat) | sha256sum | cut -c1-12))
COMPONENTS := operator manager rollout trainer
IMAGE_REFS = $(foreach c,$(COMPONENTS),$(REGISTRY)/$(c):$(TAG))
RELEASE ?= polyrl
OPERATOR_NAMESPACE ?= polyrl-system

##@ On a cluster
cluster-up: install ## Make a kind cluster, or take POLYRL_CLUSTER_DRIVER's; writes .cluster/kubeconfig
	$(CLUSTER) up

# A line of a recipe for each image, so that one which fails ends it.
define BUILD
	$(if $(GIVEN_TAG),,$(POLYRL_CLUSTER_PREFIX) docker image inspect -f '{{.RepoTags}}' $(REGISTRY)/$(c):$(TAG) 2>/dev/null ||) \
	  $(POLYRL_CLUSTER_PREFIX) docker build -q -t $(REGISTRY)/$(c):$(TAG) --build-arg BASE=$(BASE) \
	  $(if $(filter rollout trainer,$(c)),--build-arg VARIANT=$(VARIANT) --build-arg "PIP_ARGS=$(PIP_ARGS)") -f images/$(c)/Dockerfile .

endef
images: ## Build the four images for CPUs (VARIANT=cuda for GPUs, BASE=, REGISTRY=, TAG=)
	$(foreach c,$(COMPONENTS),$(BUILD))

load-images: install images ## Bring the images into the cluster's nodes
	$(CLUSTER) load $(IMAGE_REFS)

deploy: load-images ## Install the chart with these images
	$(ON_CLUSTER) helm upgrade --install $(RELEASE) charts/polyrl --namespace $(OPERATOR_NAMESPACE) --create-namespace \
	  $(foreach c,$(COMPONENTS),--set images.$(c)=$(REGISTRY)/$(c):$(TAG)) --wait --timeout 180s

undeploy: ## Uninstall the chart; jobs of users keep their objects
	$(ON_CLUSTER) helm uninstall $(RELEASE) --namespace $(OPERATOR_NAMESPACE) --wait --timeout 180s

test-e2e: load-images ## Pass the tests that need a cluster, which install the chart (ARGS="-k smoke" for some)
	$(POLYRL_CLUSTER_PREFIX) env POLYRL_IMAGES=$(REGISTRY)/ROLE:$(TAG) POLYRL_RELEASE=$(RELEASE) \
	  POLYRL_OPERATOR_NAMESPACE=$(OPERATOR_NAMESPACE) $(abspath $(BIN))/python -m pytest tests/e2e -m e2e -q $(ARGS)

cluster-down: install ## Delete the cluster
	$(CLUSTER) down

.PHONY: cluster-up images load-images deploy undeploy test-e2e cluster-down
