"""The patterns by which published byte-level tokenizers cut text into pre-tokens, as regular expressions of Oniguruma.

Source: `tiktoken_ext/openai_public.py` of tiktoken 0.14, without its possessive quantifiers, which
change speed alone; and the `tokenizer.json` of Llama 3 (CL100K) and Qwen2. tiktoken's own cl100k_base
gives white space at the end of a text one pre-token, even if it holds a newline; Llama 3's does not.
"""

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K_PATTERN = _CL100K % "{1,3}"
QWEN2_PATTERN = _CL100K % ""
CL100K_BASE_PATTERN = CL100K_PATTERN.replace(r"|\s*[\r\n]+|", r"|\s+\z|\s*[\r\n]+|")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT_FORM = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT_FORM}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT_FORM}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
