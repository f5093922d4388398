# The page of a run in a real browser. Chromium is the system's; playwright, which drives it, brings none.
define BROWSER
	command -v chromium google-chrome >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends chromium fonts-dejavu-core; }
	$(BIN)/uv pip install -q --python $(BIN)/python 'playwright>=1.60,<2'
endef

##@ Test in a browser
test-browser: install ## Pass the tests that need Chromium (installed by apt where it is missing)
	$(BROWSER)
	$(BIN)/python -m pytest tests/integration/page -m browser -q

pictures: install ## Draw the docs' pictures of a finished run (RUN=runs/...; default: the newest)
	$(BROWSER)
	$(BIN)/python docs/pictures/draw.py $(RUN)

.PHONY: test-browser pictures
