"""One file an axis: tensor, context, pipeline, data; groups are passed in."""
