"""Our models in transformers: importing this registers their classes with its Auto classes, so that
`from_pretrained`, `generate`, `pipeline` and `Trainer` work on an export's folder.

`import allattn` alone does not: transformers takes seconds to import.
"""

try:
    import transformers
except ImportError:
    raise ImportError('transformers is not installed: pip install "allattn[hf]"') from None

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from allattn.huggingface.configuration import AllAttentionConfig
from allattn.huggingface.modeling import AllAttentionForCausalLM
from allattn.huggingface.per_layer import KINDS as CUT_KINDS
from allattn.huggingface.tokenization import AllAttentionTokenizer
from allattn.training.exports import MODEL_TYPE

__all__ = ["CUT_KINDS", "AllAttentionConfig", "AllAttentionForCausalLM", "AllAttentionTokenizer"]

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
    raise ImportError(f'transformers {transformers.__version__} is too old: pip install -U "allattn[hf]"')

AutoConfig.register(MODEL_TYPE, AllAttentionConfig, exist_ok=True)
AutoModelForCausalLM.register(AllAttentionConfig, AllAttentionForCausalLM, exist_ok=True)
AutoTokenizer.register(AllAttentionConfig, AllAttentionTokenizer, exist_ok=True)
