/* What a join is told before it is made, and what it is asked. */
#include "result.h"

void
oomkit_join_of_loop(oomkit_join *join, oomkit_result_site *site, int rows_sure,
                    PyObject *convert)
{
    join->site = site;
    join->evaluation = 1;
    join->rows_sure = rows_sure;
    join->convert = convert;
}

PyObject *
oomkit_join_results(const oomkit_join *join)
{
    return join->results;
}

PyObject *
oomkit_join_last(const oomkit_join *join)
{
    return PyList_GET_ITEM(join->results, PyList_GET_SIZE(join->results) - 1);
}

int
oomkit_join_traverse(const oomkit_join *join, visitproc visit, void *arg)
{
    Py_VISIT(join->results);
    return 0;
}

void
oomkit_join_weighed(oomkit_join *join, int is_sum, int found)
{
    join->is_sum = is_sum;
    join->found = found;
    join->groups = 0;
}

void
oomkit_join_grouped(oomkit_join *join, const double *weights, Py_ssize_t groups)
{
    join->group_weights = weights;
    join->groups = groups;
}

void
oomkit_join_is_of(oomkit_join *join, oomkit_join_of of)
{
    join->evaluation = of.evaluation;
    join->parked = of.parked;
    join->one_loss = of.one_loss;
    join->proving = of.proving;
    join->rows_sure = of.rows_sure;
}

int
oomkit_join_wants_sources(const oomkit_join *join)
{
    return join->required;
}

void
oomkit_join_sources(oomkit_join *join, PyObject *sources)
{
    Py_XSETREF(join->sources, sources);
}

void
oomkit_join_updated(oomkit_join *join, oomkit_memo *updated)
{
    oomkit_memo_drop(&join->updated);
    join->updated = updated;
}

Py_ssize_t
oomkit_join_loss_at(const oomkit_join *join)
{
    return join->loss_at;
}

int
oomkit_join_empty(oomkit_join *join)
{
    const int result = oomkit_join_truncate(join, 0);

    oomkit_memo_drop(&join->updated);
    Py_CLEAR(join->sources);
    join->required = 0;
    return result;
}

void
oomkit_join_aside(oomkit_join *join, oomkit_join *aside)
{
    *aside = *join;
    *join = (oomkit_join){.site = aside->site};
}

void
oomkit_join_back(oomkit_join *join, const oomkit_join *aside)
{
    oomkit_join_clear(join);
    *join = *aside;
}
