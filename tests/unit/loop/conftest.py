from parts.runs import bench, colours_model

__all__ = ["bench", "colours_model"]
