from parts.runs import bench, cache, colours_model

__all__ = ["bench", "cache", "colours_model"]
