"""The one exception that conversion raises."""


class ConverterError(ValueError):
    """An unknown converter, a converter that matched nothing, or a conversion that cannot be done or undone."""
