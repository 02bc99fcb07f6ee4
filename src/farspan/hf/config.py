"""The fields of a model's config that change its scores, for the record of a model."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

# Fields that leave the scores of given weights as they are: names and versions, precision (recorded with the model),
# quantisation (in the weights), outputs, dropout, initialisation, special tokens, labels, losses.
WITHOUT_EFFECT = re.compile(
    r"_.*|name_or_path|transformers_version|architectures|model_type|auto_map|(torch_)?dtype|\w+_implementation"
    r"|quantization(_config)?|tie_word_embeddings|use_cache|return_dict(_in_generate)?|output_\w+|tokenizer_class"
    r"|(\w+_)?(dropout|pdrop|drop)(_\w+)?|initializer_\w+|gradient_checkpointing"
    r"|(\w+_)?token_(id|ids|index)|id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params"
    r"|\w*aux_loss\w*|router_z_loss_coef|summary_\w+|classifier_\w+|pretraining_tp|chunk_size_feed_forward"
)
LONGEST = 8  # entries of a list that are recorded one by one


def scoring_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a model's config that change the scores of its weights, by name, as values of JSON. Of a
    model that also reads images or sound, they are those of its text decoder.

    Fields at their defaults are included: one that only some versions of transformers have is then absent in the
    others, and not different.
    """
    config = config.get_text_config(decoder=True)
    plain = json.loads(json.dumps(config.to_dict(), default=str), parse_constant=str)  # JSON has no infinity
    return dict(sorted(_fields(plain).items()))


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    generating = GenerationConfig().to_dict()
    found: dict[str, Any] = {}
    for name, value in config.items():
        if name in generating or WITHOUT_EFFECT.fullmatch(name):
            continue
        if name.endswith("_config") and isinstance(value, dict):
            found |= {f"{name}.{key}": one for key, one in _fields(value).items()}
        else:
            found[name] = _short(_rope(value) if name == "rope_parameters" else value)
    return found


def _rope(parameters: Any) -> Any:
    """Return parameters of RoPE in one form: versions of transformers differ in which defaults they write."""
    if not isinstance(parameters, dict):
        return parameters
    if any(isinstance(value, dict) for value in parameters.values()):  # of each type of layers
        return {kind: _rope(value) for kind, value in parameters.items() if isinstance(value, dict)}
    defaults = {"partial_rotary_factor": 1.0}
    return {name: value for name, value in parameters.items() if value not in (None, defaults.get(name))}


def _short(value: Any) -> Any:
    """Return a value with its long lists replaced by their hashes."""
    if isinstance(value, list) and len(value) > LONGEST:
        return f"{len(value)} values, hash {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]}"
    if isinstance(value, dict):
        return {name: _short(one) for name, one in sorted(value.items())}
    return value
