"""What version 0.1 documented: the names of `headwise` and of the modules on its API page."""

DOCUMENTED = {
    "headwise": """
        IDF IMQ LAYOUTS RBF SGLD SPOS SVGD Ablation AdditiveQueries Aggregation Alignment Capture Chunks
        Comparison Cosine CosinePenalty CosineRepulsion DataError Dependency Disagreement DistinctCapsules
        EMRouting Fixed Frobenius FunctionSVGD FusedLinear Gate Guidance HeadBias HeadMask Heads HeadwiseError
        Importance LayerReport Layout LayoutError Major MaskError Median NormalizedRBF NotFired Output PerHead
        Position PositionSquaredDifference Rare Relative ReleasedMedian Report Repulsion Residual Role
        RoleCollator Roles ScoreCall SeparateLinears Separator SettingError ShapeError SharedTrunk
        SimpleRouting Site Subspace Taps TorchMultihead Trunk Verification Window WordTable ablate aggregate
        align bias_heads find_heads guide idf importance jitter load load_report measure nn plots read_conllu
        repel save verify
    """,
    "headwise.aggregators": """
        Aggregator EMAggregator Residual ResidualAggregator Routing Setting SimpleAggregator TrunkAggregator
        build require_setting
    """,
    "headwise.calibration": """
        BINS Reliability predictive_entropy reliability reliability_of
    """,
    "headwise.cosine_rules": """
        CosinePenalty CosineRepulsion
    """,
    "headwise.disagreement": """
        frobenius_penalty frobenius_penalty_sum normalized_position_similarity
        normalized_position_similarity_sum output_similarity output_similarity_sum position_similarity
        position_similarity_of_mean_sum position_similarity_sum position_squared_difference
        position_squared_difference_sum subspace_similarity subspace_similarity_sum
    """,
    "headwise.flex_masks": """
        FlexMask
    """,
    "headwise.gates": """
        Gate GatedProjection
    """,
    "headwise.kernels": """
        IMQ RBF Bandwidth Cosine Fixed Kernel KernelMatrices Median NormalizedRBF ReleasedMedian
        cosine_gradient
    """,
    "headwise.mean_weights": """
        mean_of mean_weights
    """,
    "headwise.metrics": """
        OutputMoments ParameterCosine attention_entropy attention_jensen_shannon generalized_jensen_shannon
        head_distance linear_cka output_cosine output_moments parameter_cosine particle_norms
    """,
    "headwise.nn": """
        AdditiveAttention MultiheadAttention adopt valid_keys
    """,
    "headwise.particles": """
        SGLD SPOS SVGD Forces Mixing Relative Rule blend repulsion_scale update
    """,
    "headwise.plots": """
        ablation_histogram entropy_cdf head_embedding head_similarity overview reliability_diagram
        sentence_heatmap sweep to_png
    """,
    "headwise.roles": """
        Dependency Major Rare Role RoleSetting Separator Window
    """,
    "headwise.routing": """
        Chunks EMRouting Routed SimpleRouting Trunk em_routing simple_routing uniform_routing
    """,
    "headwise.votes": """
        DistinctCapsules PerHead SharedTrunk VoteSetting VoteWeight Votes full_precision
    """,
}
