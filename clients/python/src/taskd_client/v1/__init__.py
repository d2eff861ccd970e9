"""The messages of taskd's API, generated from proto/taskd/v1/taskd.proto."""
