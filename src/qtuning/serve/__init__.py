"""One collection behind HTTP: `service` knows tasks and teaching, `batching` shares passes, `app` speaks HTTP."""
