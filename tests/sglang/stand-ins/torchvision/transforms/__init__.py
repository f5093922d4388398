"""Empty stand-in, see torchvision."""

from torchvision import __getattr__  # noqa: F401
