# A real server of S3's protocol (moto), which nothing of PolyRL needs.

##@ Test with an object store
test-s3: install ## Pass the tests of checkpoints in an object store, on a server of S3's protocol that they start
	$(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt s3fs 'moto[server]>=5,<6'
	$(BIN)/python -m pytest tests/integration/trainer/test_checkpoint_store.py -q

.PHONY: test-s3
