"""Hands the weights of a folder to SGLang as its in-process users do: one tensor in shared memory, by handle.

For `hand_over`, which runs it with SGLang's own interpreter: the handle is a pickle of SGLang's classes, which is all
that SGLang takes. On a GPU the same calls carry CUDA IPC handles.

For each line that comes, a JSON line: `build`, seconds until it may be posted, and `payload`. What was built before is
freed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.multiprocessing
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket


def main() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    folders = {name: load_file(Path(name) / "model.safetensors") for name in sys.argv[1:]}
    # Private memory, as a learner's weights are, and not pages of the file.
    weights = {name: [(key, tensor.clone()) for key, tensor in found.items()] for name, found in folders.items()}
    for line in sys.stdin:
        begun = time.monotonic()
        bucket = FlattenedTensorBucket(named_tensors=weights[line.strip()])
        content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.metadata}
        payload = MultiprocessingSerializer.serialize(content, output_str=True)
        print(json.dumps({"build": time.monotonic() - begun, "payload": payload}), flush=True)


if __name__ == "__main__":
    main()
