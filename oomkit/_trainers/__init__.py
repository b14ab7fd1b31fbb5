"""Parts of oomkit.transformers and oomkit.lightning; nothing here is imported before they are."""
