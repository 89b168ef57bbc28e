"""Ring attention over packed documents of any length and any degree, usable without the rest of the toolkit."""

if __name__ != "longctx.attention":
    raise ImportError("import this package as `longctx.attention`, not by its folder's bare name `attention`")
