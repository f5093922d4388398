# The page of a run in a real browser. Chromium is the system's; playwright, which drives it, brings none.
##@ Test in a browser
test-browser: install ## Pass the tests that need Chromium (installed by apt where it is missing)
	command -v chromium google-chrome >/dev/null || { apt-get update -q && apt-get install -qy --no-install-recommends chromium fonts-dejavu-core; }
	$(BIN)/uv pip install -q --python $(BIN)/python 'playwright>=1.60,<2'
	$(BIN)/python -m pytest tests/integration/page -m browser -q

.PHONY: test-browser
