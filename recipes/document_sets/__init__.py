"""Public sets of documents with questions: how the files of each are read, and the prepared form
that all get."""
