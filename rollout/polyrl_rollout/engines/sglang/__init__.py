"""Stock SGLang, unpatched, as a child process spoken to over HTTP."""
