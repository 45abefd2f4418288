"""What stands behind `easymp config`: looking, asking, measuring, and reading the files of other libraries."""
