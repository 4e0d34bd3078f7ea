"""Messages to token ids and back, exactly. Knows chat templates and tokenizers, nothing about models or environments.

`Tokenizer` and `ChatTemplate` read what a model folder ships, `Renderer` joins the two, and one `Conversation` per trajectory
keeps the ids the model has seen. `words` makes the closed-vocabulary tokenizer of `builtin:tiny`.
"""

from polyturn.rendering.renderer import Conversation, PromptDelta, Renderer
from polyturn.rendering.template import ChatTemplate
from polyturn.rendering.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Conversation", "PromptDelta", "Renderer", "Tokenizer"]
