"""The network itself: made of a config or a folder, with a value head or adapters where they are asked for.

model_config    the config of a fresh model
model_factory   a model from it, or from a Hugging Face folder
blocks          its layers: sharded together, computed twice to save memory
attention       over packed rows, without a mask
value_head      a number for each position
lora            low-rank adapters on a frozen model
"""
