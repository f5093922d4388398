# A version's files, built twice from its commit and compared byte for byte (docs/how-to/release.md). Needs Helm 4 and, for the
# images, buildah; IMAGES=no leaves the images out. HELM and BUILDAH may be commands with others before them.
HELM ?= $(POLYRL_CLUSTER_PREFIX) helm
BUILDAH ?= buildah
IMAGES ?= yes
RELEASING := PYTHONPATH=make $(BIN)/python -P -m release

##@ Release
release-check: install ## Say why this tree is no release: changes, versions, changelog, tag
	$(RELEASING) check

release: release-check ## Build wheel, sdist, chart, bills of materials and images twice, compare them, sum them up in dist/
	$(RELEASING) build --out dist/release --helm "$(HELM)" --buildah "$(BUILDAH)" \
	  --parts packages chart bill $(if $(filter yes,$(IMAGES)),images) \
	  --image-options "--build-arg BASE=$(BASE) --build-arg VARIANT=$(VARIANT) --build-arg=\"PIP_ARGS=$(PIP_ARGS)\""

.PHONY: release release-check
