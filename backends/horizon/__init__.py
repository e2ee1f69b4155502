"""The vendor's compiler and simulator for bernoulli2, bayes and bayes-e, run as programs that the user has installed.

Nothing of the tool is needed to install, import or test fxquant. FXQUANT_HORIZON names the folder of its environment;
without it PATH is searched.
"""
