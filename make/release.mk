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
# Public keys: those that sign charts, as gpg --export writes them, and the one that signs images, as cosign does.
KEYRING ?= SIGNERS.gpg
COSIGN_PUBLIC ?= SIGNERS.cosign
COSIGN ?= cosign

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

release-sign: $(RELEASE_STAMP) ## Sign what make release built, with KEY=FILE of SIGNERS=FILE, and the chart with PGP_KEY=ID of KEYRING=FILE
	@$(RELEASING) sign dist/release --version "$(VERSION)" --signers "$(SIGNERS)" --key "$(KEY)" \
	  --pgp-key "$(PGP_KEY)" --keyring "$(KEYRING)"

release-verify: $(RELEASE_STAMP) ## Say whether FOLDER= holds what was signed as VERSION= by keys of SIGNERS= and KEYRING=
	@$(RELEASING) verify "$(FOLDER)" --version "$(VERSION)" --signers "$(SIGNERS)" --keyring "$(KEYRING)"

release-sign-images: $(RELEASE_STAMP) ## Sign the images that REGISTRY= has of the release in FOLDER=, with COSIGN_KEY=FILE
	@$(RELEASING) sign-images "$(FOLDER)" --version "$(VERSION)" --signers "$(SIGNERS)" --home "$(REGISTRY)" \
	  --key "$(COSIGN_KEY)" --public "$(COSIGN_PUBLIC)" --cosign "$(COSIGN)"

release-verify-images: $(RELEASE_STAMP) ## Say whether REGISTRY= has the images of the release in FOLDER=, signed by COSIGN_PUBLIC=
	@$(RELEASING) verify-images "$(FOLDER)" --version "$(VERSION)" --signers "$(SIGNERS)" --home "$(REGISTRY)" \
	  --public "$(COSIGN_PUBLIC)" --cosign "$(COSIGN)"

.PHONY: release release-check release-sign release-verify release-sign-images release-verify-images
