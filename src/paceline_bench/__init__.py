"""What shows how good Paceline is: benches beside other libraries, and predictions scored on published runs.

``paceline bench engines``, ``paceline bench gpu`` and ``paceline validate`` are here. No run needs any of it, and the
package imports it for these verbs alone.
"""
