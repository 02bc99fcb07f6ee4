"""CEPE: any decoder with a small bidirectional encoder for distant text (Yen et al. 2024, arXiv 2402.16617).

    Φ = concat(encoder(C_1), ..., encoder(C_k))       each chunk separately, bidirectional
    h += SA(ln_1 h);  h += CA(ln_x h, Φ);  h += MLP(ln_2 h)       in the last `num_cross_attn_layers` layers

The decoder is frozen; encoder and cross-attention are added. The cross-attention has no positions, so the context is a
set: the model sees neither the order of its chunks nor their distance, unless `add_order` adds them (see `order`).

    model = cepe.from_base("path/of/decoder", "path/of/encoder")
    context = model.encode_context(ids)                # once: [batch, chunks, length]
    model.generate(prompt, context=context)            # any number of times
"""

from farspan.cepe.checkpoint import class_of, from_base, from_pretrained
from farspan.cepe.context import MODES, Context
from farspan.cepe.model import CepeModel

__all__ = ["MODES", "CepeModel", "Context", "class_of", "from_base", "from_pretrained"]
