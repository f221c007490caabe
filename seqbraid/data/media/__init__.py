"""Images, videos and audio: files opened within limits, measured by their headers, decoded, cut to patches.

Also the processors that hold their settings, and their placeholders in a text.
"""
