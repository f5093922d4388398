# A version's files, built twice from its commit and compared byte for byte (docs/how-to/release.md). Needs Helm 4 and, for the
# images, buildah; IMAGES=no leaves the images out. HELM and BUILDAH may be commands with others before them.
HELM ?= $(POLYRL_CLUSTER_PREFIX) helm
BUILDAH ?= buildah
IMAGES ?= yes
# Releases are built by programs that fit the lock's hashes, in an environment of their own.
RELEASE_TOOLS := dist/tools
RELEASE_STAMP := $(RELEASE_TOOLS)/.installed-$(shell cat pyproject.toml constraints.lock | cksum | cut -d' ' -f1)
RELEASING := PYTHONPATH=make $(RELEASE_TOOLS)/bin/python -P -m release
VERSION ?= $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
FOLDER ?= dist/release
SIGNERS ?= SIGNERS

$(RELEASE_STAMP):
	rm -rf $(RELEASE_TOOLS)
	$(PYTHON) -m venv $(RELEASE_TOOLS)
	sed -n '/^uv==/,/[^\\]$$/p' constraints.lock >$(RELEASE_TOOLS)/uv.txt
	$(RELEASE_TOOLS)/bin/python -m pip install -q --require-hashes --only-binary :all: -r $(RELEASE_TOOLS)/uv.txt
	$(RELEASE_TOOLS)/bin/uv pip install -q --python $(RELEASE_TOOLS)/bin/python --require-hashes --no-build -c constraints.lock \
	  -r pyproject.toml --extra release
	touch $@

##@ Release
release-check: $(RELEASE_STAMP) ## Say why this tree is no release: changes, versions, changelog, tag, lock
	$(RELEASING) check

release: release-check ## Build wheel, sdist, chart, bills of materials and images twice, compare them, sum them up in dist/
	$(RELEASING) build --out dist/release --helm "$(HELM)" --buildah "$(BUILDAH)" \
	  --parts packages chart bill $(if $(filter yes,$(IMAGES)),images) \
	  --image-options "--build-arg BASE=$(BASE) --build-arg VARIANT=$(VARIANT) --build-arg=\"PIP_ARGS=$(PIP_ARGS)\""

release-sign: $(RELEASE_STAMP) ## Sign what make release built, with KEY=FILE, one of those that SIGNERS=FILE names
	@$(RELEASING) sign dist/release --version "$(VERSION)" --signers "$(SIGNERS)" --key "$(KEY)"

release-verify: $(RELEASE_STAMP) ## Say whether FOLDER= holds what was signed as VERSION= by a key of SIGNERS=
	@$(RELEASING) verify "$(FOLDER)" --version "$(VERSION)" --signers "$(SIGNERS)"

.PHONY: release release-check release-sign release-verify
