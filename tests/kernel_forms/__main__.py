"""Kernels of the forms of an encoder in export/KERNELS.md: ``python -m tests.kernel_forms [WORD]``.

Each form is a graph of random weights, of which TensorRT-RTX builds engines without a GPU: 384 wide, 12 heads of 32,
1,536 hidden units. The kernels of a layer are those of three layers without those of two. With a word, only forms with
it in their names are built. All take a minute or two.
"""

import sys

from tests.kernel_forms.around import AROUND, around
from tests.kernel_forms.layers import ALONE, INT8, count, feed_forwards, int8_products
from tests.kernel_forms.qkv import QKV

word = " ".join(sys.argv[1:])
eight = {"out": "output", "up": "output"}
forms = [("FP16 layer", name, lambda layers, qkv=qkv: count(layers, qkv, {})) for name, qkv in QKV.items()]
forms += [
    ("INT8 layer", name, lambda layers, how=how: count(layers, int8_products, eight | how))
    for name, how in INT8.items()
]
forms += [("feed-forward", name, lambda layers, how=how: feed_forwards(layers, how)) for name, how in ALONE.items()]
for what, name, kernels in forms:
    if word in name:
        print(f"{what}: {name}: {kernels(3) - kernels(2)}", flush=True)
for name, how in AROUND.items():
    if word in name:
        print(f"two layers, pooler: {name}: {around(*how)}", flush=True)
