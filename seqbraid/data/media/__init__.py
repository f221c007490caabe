"""Images, videos and sounds: files opened within limits, measured by their headers, decoded, cut to patches.

Also the processors that hold their settings, and the placeholders that stand for them in a text.
"""
