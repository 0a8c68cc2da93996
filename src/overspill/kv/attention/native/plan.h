// How a job is divided into pieces of work, and how their results are put together.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace overspill {

// The part of a query token's result that one segment contributes.
struct Part {
    int32_t segment, first_chunk, end_chunk;
    int32_t position;  // of the query token among those of the segment
};

// Valid for every job with the same layout and segments: the layers of a step share it.
struct Plan {
    const OverspillLayout* layout = nullptr;
    const OverspillSegment* segments = nullptr;
    int num_segments = 0, num_queries = 0;
    const Kernel* kernel = nullptr;
    std::vector<Chunk> chunks;
    std::vector<Part> parts;          // by query token
    std::vector<int32_t> first_part;  // of each query token, and one past the last
    size_t result_floats = 0, query_floats = 0, state_floats = 0;
    int64_t bytes = 0;  // of KV

    bool fits(const OverspillJob& job) const {
        return layout == job.layout && segments == job.segments && num_segments == job.num_segments &&
               num_queries == job.num_queries;
    }
};

// What makes the job impossible; empty if nothing does.
std::string objection(const OverspillJob& job);
// `forced` is the kernel to use, or null; the plan has no kernel if none can do the job.
Plan make_plan(const OverspillJob& job, const Kernel* forced);
// Writes the output and log-sum-exp of one query token and query head.
void merge(const OverspillJob& job, const Plan& plan, const float* results, int query, int head);

}  // namespace overspill
