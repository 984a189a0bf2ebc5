"""The descriptor pool of the generated messages, apart from protobuf's default one (see ``proto/generate.py``)."""

from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
