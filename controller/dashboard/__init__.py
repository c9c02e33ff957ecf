"""The web dashboard of a controller, on the port of its metrics.

    views   the content of each page, as JSON, read from the controller's parts on request
    live    the same once a second, for a limited number of viewers
    site    paths: the page's public files, and the data that they request
    standby the same paths at a standby controller: which controller leads
    static  the page itself: HTML, style, scripts and uPlot; there is no build step

Without viewers it costs nothing, and nothing is counted for it while requests are served. A refresh reads at most a few
thousand rows of telemetry, in slices between which requests are served. Viewers of the same page share a refresh. A viewer
that is too slow misses some; they are not kept.

It is read-only. A caller's key stays in the browser tab and is sent in a header, never in a cookie, so that no other page
can make a browser send it.
"""
