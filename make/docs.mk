# The documentation's site, of docs/ and of what else a reader wants to find (mkdocs.yml). Nothing is fetched for it.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

##@ Document
docs: install ## Build the documentation's site into build/site
	$(MKDOCS) build

docs-serve: install ## Show the site on 127.0.0.1:8000, and follow what changes
	$(MKDOCS) serve

.PHONY: docs docs-serve
