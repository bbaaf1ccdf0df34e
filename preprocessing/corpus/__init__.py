"""The corpus stage: text gathered into Pile form."""
